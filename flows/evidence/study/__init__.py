"""`turnwise study FILE`: compares equally tuned methods over tasks and seeds. Its runs are ordinary runs. No learning."""
