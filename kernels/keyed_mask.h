// Which entries a keyed dropout keeps; sylvie_fx/ir/ops.py, keep_mask, specifies it.
#pragma once
#include <cstdint>

constexpr uint32_t GOLDEN = 0x9E3779B9u;

inline __attribute__((always_inline)) uint32_t mix(uint32_t h) { // the murmur3 finaliser
    h = (h ^ (h >> 16)) * 0x85EBCA6Bu;
    h = (h ^ (h >> 13)) * 0xC2B2AE35u;
    return h ^ (h >> 16);
}

// The number of a row before a column is mixed in.
inline __attribute__((always_inline)) uint32_t row_number(int64_t row, uint64_t key) {
    const uint64_t id = uint64_t(row);
    return mix(mix(uint32_t(id) ^ (uint32_t(id >> 32) * GOLDEN) ^ uint32_t(key)) ^ uint32_t(key >> 32));
}

// What is mixed, with whose result the threshold is compared: entries below go.
inline __attribute__((always_inline)) uint32_t entry_number(uint32_t row, uint32_t column) {
    return row ^ (column * GOLDEN);
}
