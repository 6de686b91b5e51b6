"""Virtual lab: stand-in Spark hosts, package repository, model hub and registry on a machine.

Guests are systemd-nspawn machines with real systemd, sshd, apt and dockerd. Only the hardware edge
is imitated, by packages with versions ending in ``+labstub``.
"""
