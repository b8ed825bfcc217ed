"""Division of a micro-batch over context-parallel ranks."""
