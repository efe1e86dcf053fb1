"""What a run found in a sentence a question, from its headlines: the first thing that its pages say."""

from __future__ import annotations

from labkit.runs.headline import Headline, number, speedup

EAGLE, NGRAM, OUTLOOK = "05_evaluation", "02_ngram_baseline", "03_expert_activation"


def sentences(headlines: dict[str, Headline]) -> list[str]:
    """The verdicts of a run, what was measured on a head first; predictions only where nothing was measured."""
    measured = [eagle(headlines.get(EAGLE, {})), ngram(headlines.get(NGRAM, {}))]
    found = [text for text in measured if text]
    return found or [text for text in (outlook(headlines.get(OUTLOOK, {})),) if text]


def eagle(headline: Headline) -> str:
    """Whether the trained head pays; empty where that was not measured."""
    word, found = str(headline.get("verdict") or ""), speedup(headline, "eagle3_speedup")
    if found == "–" or not word:
        return ""
    length = number(headline, "eagle3_acceptance_length")
    accepted = f", with {length} tokens a step" if length != "–" else ""
    return f"{word.capitalize()}: the EAGLE-3 head decodes {found} as fast as the target alone{accepted}."


def ngram(headline: Headline) -> str:
    """Whether n-gram pays, measured or else predicted; empty where neither is there."""
    found, predicted = speedup(headline, "ngram_speedup"), speedup(headline, "ngram_speedup_predicted")
    if found != "–":
        loud = " The machine was not quiet: measure again." if headline.get("ngram_quiet") is False else ""
        return (
            f"N-gram speculation is {side(headline, 'ngram_speedup')}: {found} as fast as the target alone.{loud}"
        )
    if predicted == "–":
        return ""
    word = headline.get("ngram_worth_trying")
    worth = f"; worth trying: {word}" if isinstance(word, str) else ""
    return f"N-gram speculation was not measured; predicted is {predicted} as fast as the target alone{worth}."


def outlook(headline: Headline) -> str:
    """What is predicted before anything is trained; empty where nothing is."""
    word, found = headline.get("predicted_verdict"), speedup(headline, "predicted_speedup")
    if not word or found == "–":
        return ""
    best = headline.get("predicted_with") or "speculation"
    return f"Predicted for {headline.get('served') or 'the target'}: {word}; {best}, {found} as fast."


def side(headline: Headline, prefix: str) -> str:
    """On which side of 1 a speedup's whole interval lies, in a word."""
    low, high = (headline.get(f"{prefix}_{end}") for end in ("low", "high"))
    if not (isinstance(low, (int, float)) and isinstance(high, (int, float))):
        return "measured without an interval"
    return "faster" if low > 1 else "slower" if high < 1 else "neither clearly faster nor slower"
