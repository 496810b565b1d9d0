"""Let `ray start` fork its workers from the warm process of the tests; Python imports this before a program that has the
folder in PYTHONPATH."""

import os
import sys

if "ray.scripts.scripts" in sys.orig_argv and "WARM_WORKERS" in os.environ:
    from ray._private.node import Node

    from tests.warm_workers import with_warm_workers

    with_warm_workers(None)
    # It is started like a worker, and nobody uses it.
    Node.start_ray_client_server = lambda *_, **__: None  # type: ignore[method-assign]
