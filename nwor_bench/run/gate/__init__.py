"""The gate: before timing, each cell runs once and is compared with off x off."""
