"""The memory planner: what an engine will take of a device, and whether that fits, before anything is loaded."""
