"""Jobs that share the links of machines: order of transfers inside jobs and between jobs."""
