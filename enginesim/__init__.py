"""A simulated engine: vLLM 0.32 or SGLang 0.5.23 by protocol, a formula in place of the model.

It serves the OpenAI API, publishes KV cache events over ZMQ, answers the pages that a router reads, and schedules by
the rule of vLLM's V1 scheduler or, with `--family sglang`, of SGLang's: fcfs and synchronous. What a forward pass costs
is a formula, so the time to first token of every request can be known in advance: that makes it the judge of the
predictor.

It shares no code with `predictor` or `extproc`, on purpose: a mistake in one must not hide in the other.

    python -m enginesim --port 8000 --model sim

`Scheduler`, `BlockPool` and `StepTime` know nothing of clocks and sockets and run in virtual time as well.
"""
