"""The job from ``init()`` to ``shutdown()``: processes, process groups and their failures."""
