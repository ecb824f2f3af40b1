"""``horovod.common``: what Horovod's frameworks share."""
