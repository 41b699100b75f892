"""What to run: scenarios, prompts, run configuration, schedule, stopping rules and sweep files."""
