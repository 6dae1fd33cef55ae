# SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#
# find_package(nprdma): nprdma::nprdma, nprdma::nprdma-alloc and nprdma::transport. Components are "far", with
# nprdma::far and nprdma::far-umap, and "sync", with nprdma::sync and nprdma::sync-job; those that are installed are
# there, asked for or not.
include("${CMAKE_CURRENT_LIST_DIR}/nprdma-targets.cmake")
foreach(component far sync)
	include("${CMAKE_CURRENT_LIST_DIR}/nprdma-${component}-targets.cmake" OPTIONAL RESULT_VARIABLE nprdma_${component}_FOUND)
endforeach()
foreach(component ${nprdma_FIND_COMPONENTS})
	if(nprdma_FIND_REQUIRED_${component} AND NOT nprdma_${component}_FOUND)
		set(nprdma_FOUND FALSE)
		string(APPEND nprdma_NOT_FOUND_MESSAGE "The component \"${component}\" is not installed. ")
	endif()
endforeach()
