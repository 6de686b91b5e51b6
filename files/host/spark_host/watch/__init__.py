"""The watchdog, the guard of a start, and the daily inspection of the host."""
