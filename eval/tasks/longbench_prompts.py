"""LongBench prompts, wording ours: equivalent to the benchmark's in order, roles and answer format.

`{context}` is the row's long text, `{input}` its question. As in the benchmark, instructions come
before the text and are said again after it, the retrieval prompts end in a space, and code prompts
end in a line break.
"""

_SHORT = "Reply with the answer alone, without explaining it."


def _qa(kind: str, source: str, extra: str = "") -> str:
    task = f"Answer a question about {kind}. {extra}{_SHORT}"
    return f"{task}\n\n{source}:\n{{context}}\n\n{task}\n\nQuestion: {{input}}\nAnswer:"


_CODE = "Complete the code below.\n"
_NEXT_LINE = "Next line of code:\n"

TEMPLATES = {
    "narrativeqa": _qa(
        "the story below, which is a novel or a film script", "Story", "Use a phrase if you can. "
    ),
    "qasper": _qa(
        "the scientific article below",
        "Article",
        "Be as brief as you can: a phrase or one sentence. If the article does not hold the "
        'answer, write "unanswerable"; for a question of fact, write "yes" or "no". ',
    ),
    "multifieldqa_en": (
        "Read this text and answer a question about it briefly.\n\n{context}\n\n"
        f"Now answer the question from the text. {_SHORT}\n\nQuestion: {{input}}\nAnswer:"
    ),
    "multifieldqa_zh": (
        "请阅读下面的文章，然后简短回答问题。\n\n{context}\n\n"
        "请根据上面的文章回答问题，只写答案，不要其他内容。\n\n问题：{input}\n回答："
    ),
    "hotpotqa": _qa("the passages below", "Passages"),
    "2wikimqa": _qa("the passages below", "Passages"),
    "musique": _qa("the passages below", "Passages"),
    "dureader": (
        "请根据下面的文章回答问题。\n\n文章：{context}\n\n请根据上面的文章作答。\n\n问题：{input}\n回答："
    ),
    "gov_report": (
        "Read this government report and summarise it on one page.\n\nReport:\n{context}\n\n"
        "Write the one-page summary of the report.\n\nSummary:"
    ),
    "qmsum": (
        "Read this meeting transcript; a query about it follows. Answer the query in one or more "
        "sentences.\n\nTranscript:\n{context}\n\nAnswer the query from the transcript in one or "
        "more sentences.\n\nQuery: {input}\nAnswer:"
    ),
    "multi_news": (
        "Read these news passages and summarise them on one page.\n\nNews:\n{context}\n\n"
        "Write the one-page summary of all the news.\n\nSummary:"
    ),
    "vcsum": (
        "下面是一段会议记录，请阅读后写一段总结，概括会议内容。\n会议记录：\n{context}\n\n会议总结："
    ),
    "trec": "Say what type each question asks for. Some examples:\n\n{context}\n{input}",
    "triviaqa": (
        "Answer the question from its passage, with the answer alone. Some examples:\n\n"
        "{context}\n\n{input}"
    ),
    "samsum": (
        "Summarise the dialogue in a few short sentences. Some examples:\n\n{context}\n\n{input}"
    ),
    "lsht": "请判断新闻的类别，下面是一些例子。\n\n{context}\n{input}",
    "passage_count": (
        "Below are paragraphs, some of which occur more than once. Read them and work out how "
        "many different paragraphs there are.\n\n{context}\n\nGive the number of different "
        "paragraphs as a number alone, such as 1, 2 or 3.\n\nNumber of different paragraphs: "
    ),
    "passage_retrieval_en": (
        "Below are 30 paragraphs and the summary of one of them. Find the paragraph that the "
        "summary is of.\n\n{context}\n\nSummary:\n\n{input}\n\nGive the number of that "
        'paragraph in the form "Paragraph 1", "Paragraph 2".\n\nThe paragraph is: '
    ),
    "passage_retrieval_zh": (
        "下面有若干段落和其中一段的摘要，请找出摘要对应的段落。\n\n{context}\n\n摘要：\n\n{input}\n\n"
        '请写出段落编号，格式为"段落1"、"段落2"。\n\n答案是：'
    ),
    "lcc": _CODE + "{context}" + _NEXT_LINE,
    "repobench-p": _CODE + "{context}{input}" + _NEXT_LINE,
}
