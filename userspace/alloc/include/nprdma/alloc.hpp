/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* nprdma-alloc: memory that is registered once and allocated from. Documentation/guides/alloc.rst */
#ifndef NPRDMA_ALLOC_HPP
#define NPRDMA_ALLOC_HPP

#include <nprdma/alloc/arena.hpp>
#include <nprdma/alloc/bundle.hpp>
#include <nprdma/alloc/errors.hpp>
#include <nprdma/alloc/object.hpp>
#include <nprdma/alloc/registrar.hpp>
#include <nprdma/alloc/type_registry.hpp>
#include <nprdma/alloc/verbs.hpp>

#endif
