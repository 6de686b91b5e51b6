"""Judge a host before anything is changed on it: pure functions from needs and a survey.

Nothing here talks to a host, so `doctor` judges in the same words as a deploy.
"""

from __future__ import annotations

from spark_deploy.hosts.facts.survey import Survey
from spark_deploy.hosts.preflight import host, workloads
from spark_deploy.hosts.preflight.verdict import Verdict
from spark_deploy.plan.machine import NeedsPlan

__all__ = ["Verdict", "judge"]


def judge(needs: NeedsPlan, survey: Survey) -> Verdict:
    """Collect everything that is wrong with a host at once."""
    judges = (host.judge_identity, host.judge_health, workloads.judge, host.judge_capacity)
    verdicts = [judge_part(needs, survey) for judge_part in judges]
    return Verdict(
        tuple(problem for verdict in verdicts for problem in verdict.problems),
        tuple(warning for verdict in verdicts for warning in verdict.warnings),
    )
