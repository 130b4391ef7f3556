"""The published data of the tasks: its source, its licence, and its conversion for the environments. Ours.

Modules:

    catalogue  which files there are: source, commit, licence, checksum, rows
    fetch      a task's files into a folder, checked, with a manifest; complete or not at all
    download   one file over https, with retries and a bar
    convert    published files as the environments read them
    wiki       passages as pages with links, and questions made from them
"""
