"""What a host shows, as one document that may be sent to others, and the questions it answers."""
