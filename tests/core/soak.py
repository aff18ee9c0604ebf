"""Many storms: `python -m tests.core.soak 10000` prints how many innocent samples were blamed."""

import json
import sys
import time

from .test_storm import run

if __name__ == "__main__":
    epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    total: dict[str, int] = {}
    began = time.monotonic()
    for first in range(0, epochs, 500):
        for key, value in run(first, min(500, epochs - first)).items():
            total[key] = total.get(key, 0) + value
        print(f"\r{total['epochs']} storms, {time.monotonic() - began:.0f} s", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(json.dumps(total))
