"""From queries to ranked labels, and what changes them: releases, label changes, feedback.

Imports no web framework and knows neither statuses nor headers. It does know the API's JSON: the models that a request
is validated into are pydantic's (queries, feedback, label_changes), and results are plain objects in the API's shape.

In the order a search meets them: searches with queue; retriever with queries, dials and resolved, ranking or
tree_ranking, exploration, overlay and catalogue; answers. known_queries searches the other way, description says what a
release has. service holds the loaded releases; follower, loader and label_changes change them.
"""
