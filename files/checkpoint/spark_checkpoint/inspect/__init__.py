"""Says what a tree or repository holds, for people; builds nothing."""
