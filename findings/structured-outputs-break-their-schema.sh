#!/bin/sh
# Question: a judge's answers are constrained to the JSON schema of a pydantic model, with score: int = Field(ge=1, le=5),
#   confidence: float = Field(ge=0, le=1), comment: str = Field(pattern="^.{1,80}$"). Which answers can a model give by
#   outlines, lm-format-enforcer and llguidance?
# Guess: only those that pydantic accepts; a rule that a library cannot keep is refused when the schema is compiled.
# Seen (outlines_core 0.2.14, lm-format-enforcer 0.11.3, llguidance 1.9.1): llguidance does that. outlines and
#   lm-format-enforcer drop minimum, maximum, multipleOf and uniqueItems without a message, so a score can be 100 or -7.
#   outlines also puts a pattern between quotes as it is: a "." is any character, also a quote or a backslash, so a
#   comment can end its own string, and the answer is not JSON. And outlines and lm-format-enforcer match a pattern
#   against the whole string, where JSON Schema searches: with pattern="km" the only possible text is "km". And
#   lm-format-enforcer ends a list after 20 items if the schema sets no maximum.
# Hurts: evaluations with a judge and data made by models: scores outside their scale enter the mean, or a parser counts
#   the answer as a failure of the model.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile \
    outlines_core==0.2.14 lm-format-enforcer==0.11.3 llguidance==1.9.1 pydantic==2.13.5
fi
"$PYTHON" - <<'PY'
import json
import re

import llguidance
from lmformatenforcer import JsonSchemaParser
from outlines_core.json_schema import build_regex_from_schema
from pydantic import BaseModel, Field, ValidationError


class Verdict(BaseModel):
    score: int = Field(ge=1, le=5)
    confidence: float = Field(ge=0, le=1)
    comment: str = Field(pattern="^.{1,80}$")


class Distance(BaseModel):
    text: str = Field(pattern="km")


class Names(BaseModel):
    names: list[int]


class Votes(BaseModel):
    votes: list[int] = Field(json_schema_extra={"uniqueItems": True})
    step: int = Field(multiple_of=5)


def outlines(schema, text):
    return re.fullmatch(build_regex_from_schema(json.dumps(schema)), text) is not None


def enforcer(schema, text):
    parser = JsonSchemaParser(schema)
    for character in text:
        if character not in parser.get_allowed_characters():
            return False
        parser = parser.add_character(character)
    return parser.can_end()


def guidance(schema, text):
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar)
    if matcher.is_error():
        return "refuses the schema"
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


LIBRARIES = {"outlines": outlines, "lm-format-enforcer": enforcer, "llguidance": guidance}
good = '{"score": 4, "confidence": 0.5, "comment": "fine"}'
answers = {
    "valid": (Verdict, good),
    "score 100": (Verdict, good.replace("4", "100")),
    "score -7": (Verdict, good.replace("4", "-7")),
    "confidence 95.0": (Verdict, good.replace("0.5", "95.0")),
    "quote in the comment": (Verdict, good.replace("fine", 'a "b')),
    "escaped quote": (Verdict, good.replace("fine", 'a \\"b')),
    "text with km": (Distance, '{"text": "12 km"}'),
    "20 names": (Names, json.dumps({"names": [7] * 20})),
    "21 names": (Names, json.dumps({"names": [7] * 21})),
    "votes twice, step 3": (Votes, '{"votes": [1, 1], "step": 3}'),
}
seen = {}
for name, (model, text) in answers.items():
    try:
        model.model_validate_json(text)
        valid = name != "votes twice, step 3"
    except ValidationError:
        valid = False
    print(f"{name}: {'valid' if valid else 'not valid'}", end="")
    for library, accepts in LIBRARIES.items():
        seen[library, name] = accepts(model.model_json_schema(), text)
        print(f"; {library}: {seen[library, name]}", end="")
    print()
    assert seen["llguidance", name] in (valid, "refuses the schema")
for library in ("outlines", "lm-format-enforcer"):
    assert seen[library, "valid"] is True
    for name in ("score 100", "score -7", "confidence 95.0", "votes twice, step 3"):
        assert seen[library, name] is True, "the behaviour has changed"
    assert seen[library, "text with km"] is False, "the behaviour has changed"
assert seen["lm-format-enforcer", "20 names"] is True
assert seen["lm-format-enforcer", "21 names"] is False, "the behaviour has changed"
assert seen["outlines", "quote in the comment"] is True, "the behaviour has changed"
PY
