"""How the login user gets in and becomes root."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from spark_deploy.facts import sections
from spark_deploy.facts.reading import HostFact

ACCOUNT = "spark-deploy"  # made by bootstrap, for deploys alone
ACCOUNT_HOME = "/var/lib/spark-deploy"
ACCOUNT_KEYS = f"{ACCOUNT_HOME}/.ssh/authorized_keys"


@dataclass(frozen=True, slots=True)
class Access:
    """Key and sudo of the login user."""

    user: str
    is_root: bool
    key_installed: bool
    sudo_free: bool  # sudo asks for no password
    sudo_there: bool
    sudoers: str | None  # our file; None: absent, or not readable without a password
    came_from: str = ""  # address of this login, as the host sees it
    account_key: str = ""  # line of authorized_keys with our key, of the account for deploys
    account_there: bool = False


class LoginAccess(HostFact[Access]):
    """Look at key and sudo of the login user, as that user, and at the account for deploys."""

    def command(self, public_key: str, sudoers_path: str) -> str:
        # Type and body of the key; the comment behind them is anybody's.
        body = shlex.quote(" ".join(public_key.split()[:2]))
        keys = (
            f"echo '== key'; grep -cF -- {body} ~/.ssh/authorized_keys 2>/dev/null",
            f"echo '== account'; grep -F -- {body} {ACCOUNT_KEYS} 2>/dev/null | head -n 1",
        )
        return sections.script(
            "echo '== user'; id -un; id -u",
            *(keys if public_key else ()),  # grep finds an empty text in every line
            "echo '== sudo'; command -v sudo >/dev/null && echo there",
            # -k: at this machine a password typed minutes ago would count for a while.
            "sudo -k -n true 2>/dev/null && echo free",
            f"echo '== sudoers'; sudo -n cat {shlex.quote(sudoers_path)} 2>/dev/null",
            "echo '== from'; echo \"${SSH_CONNECTION%% *}\"",
            f"echo '== account-there'; getent passwd {ACCOUNT}",
        )

    def process(self, output: list[str]) -> Access:
        found = sections.whole(output)
        user, uid = [*found.get("user", ()), "", ""][:2]
        sudo = found.get("sudo", ())
        sudoers = found.get("sudoers", ())
        return Access(
            user=user,
            is_root=uid == "0",
            key_installed=sections.first(found, "key") not in ("", "0"),
            sudo_free=uid == "0" or "free" in sudo,
            sudo_there="there" in sudo,
            sudoers="\n".join(sudoers) + "\n" if sudoers else None,
            came_from=sections.first(found, "from").partition("%")[0],
            account_key=sections.first(found, "account"),
            account_there=bool(found.get("account-there")),
        )
