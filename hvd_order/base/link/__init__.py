"""Link model, and the slice settings that suit it."""
