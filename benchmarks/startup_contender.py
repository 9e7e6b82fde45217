"""What a bare process pays for the same parts: imports, a private Ray, Serve, one empty deployment. Says so as a JSON line.

It waits for the end of its standard input before it stops Ray, so that its processes can be counted.
"""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
    """Take the steps one after the other, as a program does that knows nothing of starting quickly."""
    seconds: dict[str, float] = {}
    begun = time.perf_counter()

    def done(step: str) -> None:
        nonlocal begun
        now = time.perf_counter()
        seconds[step], begun = now - begun, now

    import torch  # noqa: F401

    done("import torch")
    from transformers import Qwen3VLForConditionalGeneration  # noqa: F401  # `import transformers` alone imports nothing

    done("import transformers")
    import ray
    from ray import serve

    done("import Ray and Serve")
    from ray.rllib.algorithms.algorithm import Algorithm  # noqa: F401

    done("import RLlib")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    done("ray.init")
    serve.start(proxy_location="Disabled")
    done("serve.start")

    @serve.deployment(ray_actor_options={"num_cpus": 0})
    class Empty:
        def __call__(self) -> None:
            pass

    serve.run(Empty.bind(), route_prefix=None)
    done("empty deployment")
    print(json.dumps({"seconds": seconds}), flush=True)
    sys.stdin.read()
    ray.shutdown()


if __name__ == "__main__":
    main()
