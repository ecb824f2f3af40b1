#pragma once

/* Functions of the engine's Python module for libraries of operators, in plain C: neither side uses
 * the other's C++ types, so each may be built separately. The module returns the address of a table
 * (`engine_api()`), and Python passes it on. */

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define HVDO_ENGINE_API_VERSION 1

/* Place of a gradient: number of the exchange, then of the gradient in it. */
typedef struct {
  uint32_t exchange;
  uint32_t index;
} hvdo_position;

enum hvdo_error_kind {
  HVDO_MISTAKE = 1,    /* an error of the caller */
  HVDO_COLLECTIVE = 2, /* a rank is gone, late, or the job has failed */
  HVDO_NOT_THERE = 3,  /* init() was not called, or shutdown() was */
  HVDO_INTERNAL = 4
};

/* The text begins with the name of the Python exception: "PeerLost: rank 1 is gone ...". */
typedef void (*hvdo_failed)(void* context, int kind, const char* text);

/* Receiver of a sum. `receive` copies the sum; then `done` is called, or after an error `failed`,
 * from any thread, and no function after that. */
typedef struct {
  void* context;
  void (*receive)(void* context, const void* sum, size_t size_bytes);
  void (*done)(void* context);
  hvdo_failed failed;
} hvdo_taker;

typedef struct {
  uint32_t version;
  uint32_t size_bytes; /* of this table; new fields are only added at its end */
  /* Copies a gradient to the engine. Returns 1, or 0 after calling `failed`. */
  int (*post)(
      hvdo_position position,
      const void* gradient,
      size_t size_bytes,
      void* context,
      hvdo_failed failed);
  /* Requests the sum of a posted gradient; returns at once. */
  void (*take)(hvdo_position position, const hvdo_taker* taker);
} hvdo_engine_api;

#ifdef __cplusplus
}
#endif
