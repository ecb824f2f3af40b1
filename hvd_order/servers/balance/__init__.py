"""Assignment of slices to servers, at the start and as servers change speed."""
