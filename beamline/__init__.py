"""An inference server for sequence models.

The subpackages are links to the directories at the top level of the repository, so that everything is imported by one
name.
"""
