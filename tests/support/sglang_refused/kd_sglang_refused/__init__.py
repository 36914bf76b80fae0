"""Makes a server on which kdtree_mla must refuse to run, as an SGLang plugin of its own.

With this folder on PYTHONPATH, SGLang finds the plugin by the metadata beside this package.

    KD_TEST_SGLANG_VERSION   what kdtree_mla is told that the installed SGLang is
    KD_TEST_REMOVED          `module:name`, taken out of SGLang before kdtree_mla looks for it
"""
