"""Models, profiles and guard rails as frozen data; read once, used by planning."""
