"""Where text is and how it is read: corpora, their files, formats, held-out documents."""
