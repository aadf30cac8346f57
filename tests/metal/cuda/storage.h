// The storage types of tensors: their rounding, and values as bytes and back.
#pragma once

#include <cstdint>
#include <vector>

enum class Storage { kFloat32, kFloat16, kBFloat16 };

double rounding_unit(Storage storage);  // largest relative error of one rounding
// Largest absolute error of rounding a value near x: below the normal range the relative one grows.
double storage_rounding(double x, Storage storage);
float round_to(float x, Storage storage);

std::vector<std::uint8_t> to_storage(const std::vector<float>& values, Storage storage);
std::vector<float> from_storage(const std::vector<std::uint8_t>& bytes, Storage storage);
