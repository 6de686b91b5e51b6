"""Judge a host before anything is changed on it: pure functions from needs and a survey.

Nothing here talks to a host, so `doctor` judges in the same words as a deploy.
"""

from __future__ import annotations

from spark_deploy.facts.machine.survey import Survey
from spark_deploy.planning.machine import NeedsPlan
from spark_deploy.preflight import capacity, health, identity, workloads
from spark_deploy.preflight.verdict import Verdict

__all__ = ["Verdict", "judge"]


def judge(needs: NeedsPlan, survey: Survey) -> Verdict:
    """Collect everything that is wrong with a host at once."""
    verdicts = [module.judge(needs, survey) for module in (identity, health, workloads, capacity)]
    return Verdict(
        tuple(problem for verdict in verdicts for problem in verdict.problems),
        tuple(warning for verdict in verdicts for warning in verdict.warnings),
    )
