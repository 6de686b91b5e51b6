"""Plan the tokens that a drafter chooses from, ranked by their frequency in a text."""

from dataclasses import replace

from spark_contract.builder_api import RankPlan

from spark_deploy.config.catalog.model import Model, PlainModel
from spark_deploy.config.catalog.profile import Profile
from spark_deploy.config.documents import digest_of
from spark_deploy.config.errors import PlanError
from spark_deploy.config.settings.types import Settings
from spark_deploy.lock.types import LockedSource
from spark_deploy.plan.types import VocabularyPlan

_TOKENIZER = "tokenizer.json"


def vocabulary_plan(
    model: Model, profile: Profile, settings: Settings, source: LockedSource, checkpoint_dir: str
) -> VocabularyPlan | None:
    """Return the plan for ranking tokens by a text; ``None`` if no text is configured."""
    drafts = profile.speculation
    if isinstance(model, PlainModel) or not (
        drafts and drafts.draft_vocabulary_text and drafts.draft_vocabulary_tokens
    ):
        return None
    tokenizer = next((file for file in source.files if file.path == _TOKENIZER), None)
    if tokenizer is None:
        fix = "remove engine.draft_vocabulary_text"
        raise PlanError.single(f"lock: {source.repo}", f"has no {_TOKENIZER}", fix)
    order = RankPlan(
        digest="0" * 64,
        name=model.name,
        tokenizer=f"{checkpoint_dir}/{_TOKENIZER}",
        text="/text.txt",  # placeholder; the job sets the real path
        vocabulary=model.architecture.vocabulary,
        tokens=drafts.draft_vocabulary_tokens,
        out=f"{settings.paths.models_dir}/{model.name}-draft-tokens",
    )
    digest = digest_of(
        {
            "tokenizer": tokenizer.sha256 or tokenizer.git_sha1,
            "text": digest_of(drafts.draft_vocabulary_text),
            "vocabulary": order.vocabulary,
            "tokens": order.tokens,
        }
    )
    order = replace(order, digest=digest, out=f"{order.out}-{digest[:12]}")
    return VocabularyPlan(order, drafts.draft_vocabulary_text)
