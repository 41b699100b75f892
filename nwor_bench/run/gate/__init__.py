"""The gate: each cell runs once before anything is timed, and must leave what off x off leaves."""
