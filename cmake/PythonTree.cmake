# A folder in the build tree that can be imported: the compiled module, links to the Python sources and the metadata that
# importlib.metadata reads. Put ${CMAKE_BINARY_DIR}/python on PYTHONPATH, or let scripts/link_package do it.

set(tree ${CMAKE_BINARY_DIR}/python)
set(sources ${PROJECT_SOURCE_DIR}/bindings/python/moesaic)

file(GLOB stale ${tree}/moesaic/*)
foreach(path IN LISTS stale)
  if(IS_SYMLINK ${path})
    file(REMOVE ${path})
  endif()
endforeach()
file(MAKE_DIRECTORY ${tree}/moesaic)
file(GLOB entries CONFIGURE_DEPENDS LIST_DIRECTORIES true RELATIVE ${sources} ${sources}/[a-zA-Z]* ${sources}/__[im]*.py)
foreach(entry IN LISTS entries)
  file(CREATE_LINK ${sources}/${entry} ${tree}/moesaic/${entry} SYMBOLIC)
endforeach()
file(CREATE_LINK ${PROJECT_SOURCE_DIR}/bindings/python/moesaic_command ${tree}/moesaic_command SYMBOLIC)
file(WRITE ${tree}/moesaic-${PROJECT_VERSION}.dist-info/METADATA
     "Metadata-Version: 2.1\nName: moesaic\nVersion: ${PROJECT_VERSION}\n")
file(WRITE ${tree}/moesaic-${PROJECT_VERSION}.dist-info/entry_points.txt "[console_scripts]\nmoesaic = moesaic_command:main\n")

set_target_properties(_core PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${tree}/moesaic)
# Libraries that `moesaic profile` loads into other programs lie beside the module.
foreach(library moesaic_nvtx_collector moesaic_os_shim)
  if(TARGET ${library})
    set_target_properties(${library} PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${tree}/moesaic)
  endif()
endforeach()
