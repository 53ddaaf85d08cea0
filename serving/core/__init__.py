"""From queries to ranked labels, and what changes them: releases, label changes, feedback.

Imports no web framework and knows neither statuses nor headers. It does know the API's JSON: the models that a request
is validated into are pydantic's (queries, feedback, label_changes), and a batch's labels are written as JSON bytes here
(catalogue, retriever), so that a label is serialised once however many queries it answers.

In the order a search meets them: service, queue and searches; retriever with queries, encoder, ranking or tree_ranking,
exploration, overlay and catalogue. Beside them follower and loader (releases), label_changes,
and feedback.
"""
