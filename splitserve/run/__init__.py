"""A run from the outside: its folder, its processes, the flow of samples, and what one sees."""
