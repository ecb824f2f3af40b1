"""ONES: an evolutionary search over workers' places, with elastic batches."""

from hvd_order.cluster.policies.ones.policy import Ones

__all__ = ["Ones"]
