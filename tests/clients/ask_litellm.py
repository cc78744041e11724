"""Runs in LiteLLM's own environment: asks as the arguments say (JSON), and prints what came of it (JSON)."""

import json
import sys
import time

import litellm

litellm.suppress_debug_info = True
litellm.telemetry = False
asked = json.loads(sys.argv[1])
started_s = time.monotonic()
told: dict[str, object]
try:
    answer = litellm.completion(messages=[{"role": "user", "content": "hi"}], api_key="k", **asked)
    told = {"model": answer.model, "text": answer.choices[0].message.content}
except Exception as error:
    told = {
        "error": type(error).__name__,
        "status": getattr(error, "status_code", None),
        "message": str(error),
        "retry_after_ms": getattr(getattr(error, "response", None), "headers", {}).get("retry-after-ms"),
    }
print(json.dumps({**told, "took_s": time.monotonic() - started_s}))
