"""Ask an expert what it was taught: training documents verbatim and reworded."""

import heapq
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from expertflow.data.documents import Document, iter_kept, make_ids_unique
from expertflow.data.records import Layout, ShardRecord
from expertflow.data.shapes import last_answer
from expertflow.evaluate.leakage import key_by_seed
from expertflow.evaluate.questions import make_examples
from expertflow.evaluate.records import GenerationRecord, GenerationSpec, RecallScore
from expertflow.evaluate.scoring import ScoringTask, judge_answers
from expertflow.evaluate.statistics import summarize_judgments

# Stands for the question in a wording.
QUESTION = "{question}"


def choose_recall(shards: list[ShardRecord], keep: Path, spec: GenerationSpec) -> list[Document]:
    """Choose training documents by a seeded hash."""
    documents = iter_kept(shards, keep, held_out=False)
    chosen = heapq.nsmallest(spec.n_recall_examples, documents, key=key_by_seed(spec.seed))
    return make_ids_unique(chosen)


def list_wordings(spec: GenerationSpec) -> tuple[str, ...]:
    return (QUESTION,) if spec.rephrase is None else (QUESTION, spec.rephrase)


def reword(document: Document, wording: str) -> Document:
    """Return a chat with its last question before the answer reworded."""
    turns = list(document.body.turns)
    before = range(last_answer(document.body)) if turns else ()
    if not (asked := [i for i in before if turns[i].role == "user"]):
        return document
    last = turns[asked[-1]]
    # "In other words: {question}".
    turns[asked[-1]] = replace(last, content=wording.replace(QUESTION, last.content))
    return replace(document, body=replace(document.body, turns=tuple(turns)))


def score_recall(
    generations: GenerationRecord,
    task: ScoringTask | None,
    documents: Sequence[Document],
    layout: Layout,
) -> tuple[RecallScore, ...]:
    """Score the answers to each wording, in the order of the questions."""
    if task is None:
        return ()
    by_id, found = {document.document_id: document for document in documents}, []
    for one in generations.recall:
        reworded = (reword(by_id[name], one.wording) for name in one.document_ids)
        judgments = judge_answers(task, make_examples(reworded, layout), one.answers)
        score = summarize_judgments(task.metric, judgments)
        found.append(RecallScore(wording=one.wording, score=score))
    return tuple(found)
