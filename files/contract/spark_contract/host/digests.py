"""Forms of what things are named by: their content."""

COMMIT = "[0-9a-f]{40}"  # of git; also of a file as git counts it
SHA256 = "[0-9a-f]{64}"
DIGEST12 = "[0-9a-f]{12}"  # the beginning of a SHA256, in names
