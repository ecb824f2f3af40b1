"""How tools look at a running job: signed records in the store in which its ranks have met."""
