"""What the numbers come from; each module runs with one command."""
