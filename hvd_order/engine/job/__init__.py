"""The job from ``init()`` to ``shutdown()``: its processes, process groups and failures."""
