"""The simulator's own switches, under `/sim/`: for tests and scenes, unknown to real engines."""

from aiohttp import web

from enginesim.api_errors import bad_request
from enginesim.api_requests import SpeedBody, decode
from enginesim.engine import Engine
from enginesim.faults import FaultPages, Faults


class Admin:
    """Handlers that look into the engine or trouble it. A new fault is a field of `FaultSettings`."""

    def __init__(self, engine: Engine, faults: Faults) -> None:
        self._engine = engine
        self._faults = FaultPages(faults)

    def routes(self) -> list[web.RouteDef]:
        """All of `/sim/`."""
        return [
            web.get("/sim/state", self.state),
            web.post("/sim/speed", self.set_speed),
            web.post("/sim/restart", self.restart),
            web.get("/sim/faults", self._faults.show),
            web.post("/sim/faults", self._faults.change),
            web.delete("/sim/faults", self._faults.clear),
        ]

    async def state(self, http: web.Request) -> web.Response:
        """`GET /sim/state`: counts as of now, not of the last step. `seq` is the next batch's sequence number, `late_s`
        the seconds by which all steps together were slower than told, for want of a core."""
        scheduler = self._engine.scheduler
        return web.json_response(
            {
                "running": len(scheduler.running),
                "waiting": len(scheduler.waiting),
                "cached_blocks": scheduler.pool.cached_blocks,
                "distinct_blocks": scheduler.pool.distinct_blocks,
                "free_blocks": scheduler.pool.free_blocks,
                "used_blocks": scheduler.pool.used_blocks,
                "steps": scheduler.totals.steps,
                "preemptions": scheduler.totals.preemptions,
                "seq": self._engine.publisher.next_sequence,
                "speed": self._engine.step_time.speed,
                "late_s": self._engine.late_s,
            }
        )

    async def set_speed(self, http: web.Request) -> web.Response:
        """`POST /sim/speed {"speed": 0.5}`: from the next step on. 400 if it is no number above 0."""
        body = decode(await http.read(), SpeedBody)
        try:
            self._engine.step_time.speed = body.speed
        except ValueError as error:
            raise bad_request(str(error), "speed") from error
        return web.json_response({"speed": self._engine.step_time.speed})

    async def restart(self, http: web.Request) -> web.Response:
        """`POST /sim/restart`: as after a crash, in the same process. Requests are cut, the cache is empty, batches
        are numbered from 0 and nothing is left to replay. Answers when that is done: at the end of the step."""
        await self._engine.restart()
        return web.Response()
