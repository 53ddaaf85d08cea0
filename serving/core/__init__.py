"""From queries to ranked labels, and what changes them: releases, label changes, feedback. Knows no HTTP.

In the order a search meets them: service and its batcher; retriever with queries, encoder, ranking or tree_ranking,
overlay and catalogue. Beside them follower and loader (releases), label_changes, feedback, and executor for their work.
"""
