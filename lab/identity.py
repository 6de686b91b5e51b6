"""A guest's name, accounts, keys and package sources; written before the first boot."""

import shutil

from lab import cgroup
from lab.archive import OS_ARCHIVE, of_variant
from lab.guest import Guest
from lab.memory import write_memory
from lab.paths import HOST_IP, USER, LabPaths
from lab.shell import run


def ensure_ssh_key(paths: LabPaths) -> None:
    if not paths.ssh_key.exists():
        comment = "virtual lab"
        run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", paths.ssh_key])


def write_identity(guest: Guest) -> None:
    spec, etc = guest.spec(), guest.root / "etc"
    (etc / "hostname").write_text(f"{guest.name}\n")
    (etc / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {guest.name}\n{HOST_IP} lab-host\n")
    if not cgroup.is_v2():
        # On v1 a guest is not notified when a delegated cgroup becomes empty, so stopping the user
        # manager would take the full timeout of two minutes.
        (etc / "systemd/system/user@.service").symlink_to("/dev/null")
    for key in (etc / "ssh").glob("ssh_host_*"):  # cloned keys of a variant's base
        key.write_bytes(key.read_bytes())  # copied to the guest's disk, where `host_key` reads them
    write_memory(guest.root)
    _write_sources(guest)
    sshd = etc / "ssh/sshd_config.d/10-lab.conf"
    sshd.parent.mkdir(exist_ok=True)
    sshd.write_text(f"PasswordAuthentication {'yes' if spec.bootstrap else 'no'}\nUseDNS no\n")
    if spec.password is not None:
        run(["chroot", guest.root, "chpasswd"], stdin=f"{USER}:{spec.password}\n")
    else:
        _allow_lab_login(guest)
    (guest.home / "identity").write_text("written")


def _write_sources(guest: Guest) -> None:
    keyrings = guest.root / "etc/apt/keyrings"
    keyrings.mkdir(parents=True, exist_ok=True)
    archive = of_variant(guest.variant) if guest.variant else OS_ARCHIVE
    key = keyrings / f"{archive.name}.asc"
    shutil.copy(guest.paths.apt / archive.directory / "archive-key.asc", key)
    source = f"deb [signed-by=/etc/apt/keyrings/{key.name}] {archive.url} {archive.suite} main\n"
    (guest.root / f"etc/apt/sources.list.d/{archive.name}.list").write_text(source)


def _allow_lab_login(guest: Guest) -> None:
    ssh_dir = guest.root / "home" / USER / ".ssh"
    ssh_dir.mkdir(mode=0o700)
    authorized = ssh_dir / "authorized_keys"
    authorized.write_text(guest.paths.ssh_key.with_suffix(".pub").read_text())
    authorized.chmod(0o600)
    run(["chroot", guest.root, "chown", "-R", f"{USER}:{USER}", f"/home/{USER}/.ssh"])
    sudoers = guest.root / "etc/sudoers.d/90-lab"
    sudoers.write_text(f"{USER} ALL=(ALL:ALL) NOPASSWD: ALL\n")
    sudoers.chmod(0o440)
