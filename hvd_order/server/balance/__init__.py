"""Which server holds which slice, at the start and as servers change speed."""
