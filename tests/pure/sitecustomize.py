"""On PYTHONPATH, this makes Holdfast one that was built without a compiler: in this interpreter and all that it starts.

`make test-pure` puts it there. To import an extension raises ImportError then, and Python does the work of it.
"""

import sys

for extension in ("shm._stream", "system._sender", "local.protocol._pulse"):
    sys.modules[f"holdfast.{extension}"] = None  # type: ignore[assignment]
