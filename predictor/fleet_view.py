"""What is known of a fleet, as plain values for people and dashboards."""

from __future__ import annotations

from dataclasses import asdict

from predictor.feed_state import Trust
from predictor.kv_events import Tier
from predictor.pool import Pool
from predictor.prefill_cost import Witness
from predictor.run_forward import Budget
from predictor.worker import Worker


def pool_view(pool: Pool, now_s: float, budget: Budget) -> dict[str, object]:
    return {
        "expected_output_tokens": pool.expected_output(None, None, now_s),
        "admission": {
            "mode": pool.mode.value,
            "configured": pool.policy.admission.mode.value,
            "false_alarm_rate": pool.guard.false_alarm_rate,
        },
        "workers": {name: _worker_view(pool, worker, now_s, budget) for name, worker in pool.workers.items()},
    }


def _worker_view(pool: Pool, worker: Worker, now_s: float, budget: Budget) -> dict[str, object]:
    shadow = worker.shadow
    timeline = shadow.timeline(now_s, budget) if budget.left > 0 else shadow.standing_timeline(now_s, budget)
    cost, settings = worker.cost.cost, worker.settings
    view = pool.cache.view(worker.spec.name)
    return {
        "endpoint": worker.spec.endpoint,
        "up": worker.up,
        "draining": worker.draining,
        "feed": view.trust.value,
        "feed_trusted": view.trust is Trust.LIVE,
        "feed_coverage": round(view.coverage, 4),
        "feed_agreement": round(view.agreement, 4),
        "feed_silent": view.silent,
        "in_flight": len(worker.tickets),
        "prefilling": worker.shadow.prefilling,
        "decoding": worker.shadow.decoding,
        "prefill_tokens_ahead": worker.shadow.prefill_tokens_ahead(),
        "wait_s": round(max(0.0, timeline.admitted_s(0, budget) - now_s), 4),
        "cached_blocks": pool.cache.blocks(worker.spec.name),
        "cached_blocks_host": pool.cache.blocks(worker.spec.name, Tier.HOST),
        "cached_blocks_storage": pool.cache.blocks(worker.spec.name, Tier.STORAGE),
        "orphan_blocks": pool.cache.orphans(worker.spec.name),
        "num_gpu_blocks": settings.num_gpu_blocks,
        "kv_demand": worker.kv_demand(0),
        "block_size": pool.cache.block_size(worker.spec.name),
        "reuse_correction": pool.cache.correction(worker.spec.name).view(),
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "async_scheduling": settings.async_scheduling,
        "step_rule": settings.family,
        "settings": asdict(settings),
        "tokens_per_decode": round(shadow.drafting.gain, 3),
        "drafted_per_decode": round(shadow.drafting.drafted, 3),
        "token_budget_doubt": pool.budget_doubt(worker).value,
        "largest_chunk_tokens": worker.budget.largest_tokens,
        "interval": {
            "graded": worker.calibration.graded,
            "coverage": None if not worker.calibration.graded else round(worker.calibration.coverage, 4),
        },
        "cost": {
            "basis": worker.cost.basis.value,
            "samples": worker.cost.samples,
            "speed_changes": {witness.value: worker.cost.speed_changes[witness] for witness in Witness},
            "ms_per_request": round(cost.per_request_s * 1e3, 3),
            "us_per_request_token": round(cost.per_request_token_s * 1e6, 3),
            "ms_per_step": round(cost.fixed_s * 1e3, 3),
            "us_per_token": round(cost.per_token_s * 1e6, 3),
            "ns_per_token_squared": round(cost.per_token_squared_s * 1e9, 4),
            "ms_per_decode": round(cost.per_decode_s * 1e3, 4),
        },
    }
