.PHONY: run test check bench fleet test-engine test-clients chaos proto clean
BIN := .venv/bin

# The stamps: a venv is brought up to date when pyproject.toml changes, and only then.
.venv/.installed-stack: pyproject.toml scripts/venv.sh
	@sh scripts/venv.sh stack

.venv/.installed-bench: pyproject.toml scripts/venv.sh
	@sh scripts/venv.sh bench

.venv/.installed-dev: pyproject.toml scripts/venv.sh
	@sh scripts/venv.sh dev

# The local stack: real Envoy, the filter, three simulated engines, and a scene. ONCE=1 ends after the scene;
# RECORD=FILE keeps what the filter saw, for `headway backtest FILE`.
run: .venv/.installed-stack
	@$(BIN)/headway stack --scene $(if $(ONCE),--once,) $(if $(RECORD),--record "$(RECORD)",)

# All of them, in two parts; with ARGS what pytest makes of these.
test: .venv/.installed-dev
	$(if $(ARGS),$(BIN)/python -m pytest $(ARGS),sh scripts/tests.sh)

check: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/generate_pb.py --check

bench: .venv/.installed-bench
	$(BIN)/python -m bench

# Four models on sixteen unlike engines in virtual time: HOURS=48 takes hours itself. ARGS="--day-hours 3" for a shorter day.
fleet: .venv/.installed-bench
	$(BIN)/python -m bench.fleet --hours $(or $(HOURS),48) $(ARGS)

# Real vLLM engines on CPU, SGLang's scheduler and cache: each in a venv of its own outside the checkout (3.5 and 1.6 GB).
# ARGS=--reduced for a twentieth of the requests.
test-engine: .venv/.installed-dev
	sh tests/engine/setup.sh
	sh tests/engine/setup-sglang.sh
	sh scripts/tests.sh tests/engine --run-engine $(ARGS)

# LiteLLM as a client, in a venv of its own outside the checkout (about 200 MB).
test-clients: .venv/.installed-dev
	sh tests/clients/setup.sh
	$(BIN)/python -m pytest tests/clients --run-clients $(ARGS)

# Ten minutes of random kills, stops and restarts under traffic. MINUTES=2 for less.
chaos: .venv/.installed-dev
	$(BIN)/python -m tests.chaos --minutes $(or $(MINUTES),10)

proto: .venv/.installed-dev
	$(BIN)/python scripts/generate_pb.py

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
