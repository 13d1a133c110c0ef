"""Vision and text together: attention, towers, projectors, joining, models."""
