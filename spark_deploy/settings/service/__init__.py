"""Settings of what is served: one service, more beside it, and hosts together."""
